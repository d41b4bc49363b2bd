"""A head in closed form on the features of a frozen encoder, from sums that sites send once."""
