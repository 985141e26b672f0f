"""DistilBERT for sentiment with Hugging Face's Trainer.

tilefit check examples/programs/trainer.py --gpu h200 --fake-data
"""

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def main():
    checkpoint = "distilbert-base-uncased"
    raw = load_dataset("glue", "sst2")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    data = raw.map(lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=128), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)

    def accuracy(predictions):
        logits, labels = predictions
        return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}

    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=32,
        num_train_epochs=3,
        learning_rate=2e-5,
        gradient_accumulation_steps=2,
        bf16=True,
        logging_steps=10,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
