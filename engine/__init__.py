"""The decode engine: weights at stable addresses under a byte budget, idle KV lent to them and taken back.

It imports neither Hydra nor MLflow and can be used alone; see :mod:`engine.engine` and ``python -m engine.generate``.
"""
