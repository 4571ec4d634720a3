"""K-means (``kmeans``, its vectorized steps in ``steps``), and Calibre's losses on prototypes (``prototypes``)."""
