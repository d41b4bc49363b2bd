"""Skin lesions: ISIC 2018 and 2019, the data of FedLSM and Fed-MAS, and their partitions among sites."""
