"""The public functions: signatures and documentation, over the call paths of the operations."""
