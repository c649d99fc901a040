"""From a Hugging Face configuration and a checkpoint's tensor names to a graph of tensor operators."""
