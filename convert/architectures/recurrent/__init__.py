"""Architectures whose layers keep a state of fixed size: state space models, short convolutions, delta attention."""
