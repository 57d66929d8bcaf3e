"""What a run may do beside the default, each in a folder of its own."""
