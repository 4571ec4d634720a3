"""K-means, and prototypes of clusters."""
