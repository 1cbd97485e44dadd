import torch
from hypothesis import settings

torch.set_num_threads(2)
settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("default")
