"""Surgical Aggregation (Kulkarni et al., MIDL 2023 and 2024): its tables; the method is the engine's."""
