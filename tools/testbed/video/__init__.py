"""How the embedded video testbed was made: a tiny Wan pipeline of shapes that move."""
