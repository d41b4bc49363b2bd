"""Encoders of other libraries, by name (``timm:resnet50``) or from a file or folder (``hf:FOLDER``)."""
