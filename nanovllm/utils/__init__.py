"""What the model and the runner share: the context of a step, and the weight loader."""
