"""Training data: read a folder, sort it into buckets, encode and cache it, order it into batches."""
