"""The built-in vocabulary: canonical names of chest X-ray and skin lesion labels, and their synonyms.

A synonym is listed only where the two names mean one thing in the data sets that use them. HAM10000's
``akiec`` covers actinic keratosis and intraepithelial carcinoma, so it is a class of its own.
"""

CHEST: tuple[str, ...] = (
    # NIH ChestX-ray14
    "Atelectasis",
    "Cardiomegaly",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Hernia",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pleural Effusion",
    "Pleural Thickening",
    "Pneumonia",
    "Pneumothorax",
    # CheXpert and MIMIC-CXR
    "Enlarged Cardiomediastinum",
    "Fracture",
    "Lung Lesion",
    "Lung Opacity",
    "No Finding",
    "Pleural Other",
    "Support Devices",
    # CXR-LT
    "Calcification of the Aorta",
    "Pneumomediastinum",
    "Pneumoperitoneum",
    "Subcutaneous Emphysema",
    "Tortuous Aorta",
)

SKIN: tuple[str, ...] = (
    "Melanoma",
    "Melanocytic Nevus",
    "Basal Cell Carcinoma",
    "Actinic Keratosis",
    "Actinic Keratosis or Intraepithelial Carcinoma",
    "Benign Keratosis",
    "Dermatofibroma",
    "Vascular Lesion",
    "Squamous Cell Carcinoma",
)

CANONICAL: tuple[str, ...] = (*CHEST, *SKIN, "COVID-19")

SYNONYMS: dict[str, str] = {
    "Effusion": "Pleural Effusion",
    "Pleural Effusions": "Pleural Effusion",
    "Enlarged Cardiom.": "Enlarged Cardiomediastinum",
    "Lung Opacities": "Lung Opacity",
    "Normal": "No Finding",
    "Oedema": "Edema",
    "Pulmonary Edema": "Edema",
    "Infiltrate": "Infiltration",
    "Pleural Thickness": "Pleural Thickening",
    "Support Device": "Support Devices",
    "MEL": "Melanoma",
    "NV": "Melanocytic Nevus",
    "Nevus": "Melanocytic Nevus",
    "BCC": "Basal Cell Carcinoma",
    "AK": "Actinic Keratosis",
    "AKIEC": "Actinic Keratosis or Intraepithelial Carcinoma",
    "BKL": "Benign Keratosis",
    "DF": "Dermatofibroma",
    "VASC": "Vascular Lesion",
    "SCC": "Squamous Cell Carcinoma",
    "COVID": "COVID-19",
    "Covid19": "COVID-19",
}
