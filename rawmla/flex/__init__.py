"""Flex attention: user-written score and mask functions inside the kernel of dense attention."""
