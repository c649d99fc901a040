"""What the inputs of a model's layers look like, from a short run over a text that ships with the compiler."""
