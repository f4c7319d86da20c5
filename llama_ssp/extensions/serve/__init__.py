"""A server with OpenAI's interface: between rounds, free rows of the decoder take new requests."""
