"""Layers without hidden states: products, convolutions, embeddings."""
