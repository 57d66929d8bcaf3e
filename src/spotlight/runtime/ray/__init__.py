"""The Ray driver: the controller's effects carried out by processes of a cluster."""
