"""The two seams to transformers: a `Cache` made of our layers, and an attention registered with `AttentionInterface`.

Nothing outside this folder imports transformers.
"""
