BEGIN TRANSACTION;
CREATE TABLE gateway_usage (
	request_id VARCHAR NOT NULL,
	time DATETIME NOT NULL,
	day DATE NOT NULL,
	"key" VARCHAR NOT NULL,
	team VARCHAR,
	model VARCHAR,
	server VARCHAR,
	endpoint VARCHAR NOT NULL,
	stream BOOLEAN NOT NULL,
	status INTEGER,
	code VARCHAR,
	incomplete VARCHAR,
	prompt_tokens BIGINT,
	completion_tokens BIGINT,
	cached_tokens BIGINT,
	reasoning_tokens BIGINT,
	estimated BOOLEAN NOT NULL,
	total_ms FLOAT,
	first_token_ms FLOAT,
	queued_ms FLOAT,
	cost_nano BIGINT,
	labels JSON NOT NULL,
	end_user VARCHAR,
	metadata JSON,
	PRIMARY KEY (request_id)
);
INSERT INTO "gateway_usage" VALUES('req_1','2026-11-15 00:00:00.250000','2026-11-15','team-a','research','tiny','tiny#0','/v1/chat/completions',0,200,NULL,NULL,10,5,2,1,0,250.0,NULL,100.0,6000,'{"cost_center": "17"}','u','{"m": [1]}');
INSERT INTO "gateway_usage" VALUES('req_2','2026-11-15 00:00:01.500000','2026-11-15','team-a',NULL,'tiny','tiny#0','/v1/chat/completions',1,499,NULL,'client',10,7,NULL,NULL,1,1500.0,100.0,NULL,7600,'{}',NULL,NULL);
INSERT INTO "gateway_usage" VALUES('req_3','2026-11-15 00:00:02.500000','2026-11-15','team-b',NULL,NULL,NULL,'/v1/embeddings',0,404,'model_not_found',NULL,NULL,NULL,NULL,NULL,0,NULL,NULL,NULL,NULL,'{}',NULL,NULL);
CREATE TABLE gateway_usage_schema (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT gateway_usage_schema_pkc PRIMARY KEY (version_num)
);
INSERT INTO "gateway_usage_schema" VALUES('0001');
CREATE INDEX gateway_usage_time ON gateway_usage (time);
CREATE INDEX gateway_usage_key_time ON gateway_usage ("key", time);
COMMIT;
