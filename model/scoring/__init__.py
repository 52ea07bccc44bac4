"""Train trees and a small network, store them as flat arrays, and predict with them in NumPy."""
