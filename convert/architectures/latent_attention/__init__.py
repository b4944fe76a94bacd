"""Multi-head latent attention: DeepSeek V2 to V4 and what follows them."""
