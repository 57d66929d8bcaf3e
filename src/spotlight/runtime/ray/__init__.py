"""The Ray driver: the controller's effects carried out by processes that may die at any moment."""
