"""Rounds over Flower: the same client_round and server_round, with machines in between."""
