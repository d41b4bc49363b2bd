"""Chest X-rays: the data of Surgical Aggregation, FedLSM and MetaFL, and their partitions among sites."""
