"""What the terminal shows. rich lives here and nowhere else."""
