"""A tiny BERT of Hugging Face with random weights, whose last layer is `classifier`."""

from transformers import BertConfig, BertForSequenceClassification

HEAD = "classifier"


class Net(BertForSequenceClassification):
    """Maps token ids ``[n, length]`` to logits ``[n, classes]``."""

    def __init__(self, classes: int = 5) -> None:
        config = BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        config.num_labels, config.problem_type = classes, "multi_label_classification"
        super().__init__(config)
