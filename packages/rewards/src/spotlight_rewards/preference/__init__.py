"""Models of what people prefer, and of how well picture and text agree: all of them CLIP."""
