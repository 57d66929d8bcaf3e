"""The learner in the controller: where its ranks are, and what is kept of it."""
