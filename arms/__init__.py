"""What each arm means: a validated description and the engine configuration it stands for."""
