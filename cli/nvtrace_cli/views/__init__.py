"""What the terminal shows. Only these modules import rich."""
