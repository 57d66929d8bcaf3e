"""A hub model's files from another node of the cluster, where this node's disk lacks them."""
