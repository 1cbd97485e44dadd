"""One Hugging Face model for all mixers. Importing this registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from headmax.models.cache import HeadmaxCache
from headmax.models.classification import HeadmaxForSequenceClassification, HeadmaxForTokenClassification
from headmax.models.configuration import HeadmaxConfig
from headmax.models.modeling import HeadmaxForCausalLM, HeadmaxModel, HeadmaxPreTrainedModel

AutoConfig.register("headmax", HeadmaxConfig, exist_ok=True)
AutoModel.register(HeadmaxConfig, HeadmaxModel, exist_ok=True)
AutoModelForCausalLM.register(HeadmaxConfig, HeadmaxForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(HeadmaxConfig, HeadmaxForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(HeadmaxConfig, HeadmaxForTokenClassification, exist_ok=True)

__all__ = [
    "HeadmaxCache",
    "HeadmaxConfig",
    "HeadmaxForCausalLM",
    "HeadmaxForSequenceClassification",
    "HeadmaxForTokenClassification",
    "HeadmaxModel",
    "HeadmaxPreTrainedModel",
]
