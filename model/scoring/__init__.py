"""What predicts, as flat arrays that NumPy evaluates: trees and a small network; how each is trained or scored."""
