"""Predicts memory and step time of a candidate. Pure: no device, file or clock."""
