"""References, identities and gates: whether a result may be offered."""
