"""Dense multi-head attention (MHA), where V is no part of K: FlashMLA's and FlashAttention's operations."""
