"""PluralLLM, the few-shot preference predictor: model, episodes, training, prediction, text embedding."""
