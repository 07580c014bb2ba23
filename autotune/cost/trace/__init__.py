"""Records the operations of training passes on the meta device: what is allocated, kept and
computed.
"""
