"""`dash`: a local web page of the runs below a folder, which reads them and changes nothing."""
