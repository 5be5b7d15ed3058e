"""What every call shares: arrays, checks, and what is kept from call to call."""
