"""What may overlap with what: decisions of the pipeline of generation and training, each pure."""
