"""The learner: turns scored samples into optimizer steps, on one rank or several."""
