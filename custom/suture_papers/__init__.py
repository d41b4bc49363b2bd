"""The papers, and the questions that they answer: each folder has a method, its data and its partitions."""
