"""Published data sets, and folders of image files."""
