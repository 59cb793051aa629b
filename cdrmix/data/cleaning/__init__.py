"""From raw text to clean text: normalisation, filter rules, languages, personal data, addresses."""
