"""Multi-head latent attention (MLA): FlashMLA's operations."""
