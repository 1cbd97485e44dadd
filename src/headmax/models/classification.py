"""Labels for texts and tokens, and rewards: transformers' own heads on the model."""

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from headmax.models.modeling import HeadmaxPreTrainedModel


class HeadmaxForSequenceClassification(GenericForSequenceClassification, HeadmaxPreTrainedModel):
    """A score for each label from a text's last token that is not `pad_token_id`; with one label a reward model."""


class HeadmaxForTokenClassification(GenericForTokenClassification, HeadmaxPreTrainedModel):
    """A score for each label from each token."""
