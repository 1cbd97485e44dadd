"""headmax: Softmax Linear Attention. A softmax over heads that lets the heads of a linear-attention layer compete."""
