"""GenEval without mmdet: verdicts on detections (pure), the two models that make them, and a converter.

Metadata, thresholds and verdicts: https://github.com/djghosh13/geneval (arXiv 2310.11513).
"""
