import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads this when it is first imported

torch.set_num_threads(2)
settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("default")
