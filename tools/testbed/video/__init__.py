"""Makes a video testbed: a tiny Wan pipeline of shapes that move."""
