"""Files of diffusion models: pipelines, LoRAs of several programs, exports, copies from another machine."""

__version__ = "0.1.0"
